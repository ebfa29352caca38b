"""A conversation with a running service in the terminal: what `pdserve chat` is made of."""
