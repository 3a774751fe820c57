"""Images in prompts: what a file becomes, where it stands among the tokens, its features on the device."""
