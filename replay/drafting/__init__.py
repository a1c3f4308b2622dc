"""A head and the rows of a request become drafted tokens. Knows no trace."""
