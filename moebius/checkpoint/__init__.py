"""Reading Hugging Face checkpoints with numpy alone; shared by gpu_service and expert_service."""
