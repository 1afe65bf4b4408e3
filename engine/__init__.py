"""One forward pass of a Hugging Face decoder, on CPU or GPU, and sampling."""
