"""How processes and clients reach one another: TLS, gRPC channels, keys and origins."""
