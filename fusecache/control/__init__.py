"""The control socket: both its ends."""
