"""Which dimensions of the stream decide where attention goes."""
