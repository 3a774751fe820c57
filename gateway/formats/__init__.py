"""How outputs look in JSON: chat completions and text completions."""
