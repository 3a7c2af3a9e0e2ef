"""Commands that inspect this host: configuration, health, hardware, offline volumes."""
