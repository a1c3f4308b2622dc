"""From accept lengths and timings to tokens a second: does speculation pay, and at which depth."""
