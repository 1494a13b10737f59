"""Cases from Hugging Face architectures, shrunk."""
