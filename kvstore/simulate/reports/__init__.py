"""Results of simulations as tables, JSON and plots."""
