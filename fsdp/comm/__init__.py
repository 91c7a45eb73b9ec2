"""How bytes move between ranks: a small protocol, its implementations, and the user's communication hooks."""
