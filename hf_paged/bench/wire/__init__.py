"""The folder that foreign peers' processes have on their path; ``hf_paged_peer`` is all there is in it."""
