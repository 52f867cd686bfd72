"""hf_paged and stock transformers as peers, each a module to run; ``hf_paged.bench.peers`` names them."""
