"""Load plans and request scheduling over prefill and decode engines."""
