"""Forms: fixed text with named holes, filled together by the block-diffusion passes."""
