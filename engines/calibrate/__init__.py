"""`clover calibrate`: what every quantisable matrix is fed with, and which experts answer, measured on prompts."""
