"""One module per concern of putting an engine together; `gpu_service.assembly.build` calls them in order."""
