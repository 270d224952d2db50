"""Where tools come from: each source lists its tools, calls them, and writes refined words back in its own format."""
