"""From a bundle to text: the block loop and everything around it."""
