"""The API server: a connection, calls for objects, and copies of collections."""
