"""The worker side: moves pages to and from the store in the background."""
