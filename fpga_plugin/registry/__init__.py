"""OCI registries, as far as a store of bitstreams needs one: names, credentials, reading."""
