"""The statistics of a diagnosis, and how it is shown."""
