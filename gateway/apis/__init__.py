"""APIs other than OpenAI's chat and text completions: each is a translation to these and a format."""
