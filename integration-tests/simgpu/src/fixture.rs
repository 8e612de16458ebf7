//! Starts a server for a test.
