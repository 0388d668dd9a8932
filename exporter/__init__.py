"""From a Hugging Face checkpoint to a quantised weight store and a step graph."""
