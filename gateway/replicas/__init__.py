"""Distributes requests over several gpu_service replicas, and handles their failures."""
