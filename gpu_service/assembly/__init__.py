"""One module per concern of putting an engine together; `gpu_service.build` calls them in order."""
