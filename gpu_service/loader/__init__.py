"""From safetensors to filled parameters."""
