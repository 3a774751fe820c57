"""Generated gRPC stubs: the only contract between the services (regenerate with `make protos`)."""
