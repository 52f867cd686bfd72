"""The yardstick: pieces of work, timed for hf_paged and its peers side by side, with what could have disturbed them.

    command     from options to files and tables
    model       from a name to a folder and its limits
    workload    files of token ids -> cases, and what is computed from their times
    wire/       a peer's side of the line protocol, also for environments without hf_paged
    adapters/   hf_paged and stock transformers as peers; other engines' are in the repository's benchmarks/peers
    peers       which peers there are, and how each is started
    process     the runner's side of a peer's process
    load        CPU time that others used meanwhile
    contestant  one peer: started, warmed up, timed, its lengths checked
    runner      interleaved repeats, checks of lengths, what is thrown away
    agreement, reference   greedy tokens against fp32 stock
    floor       what the machine's own rates would allow
    results     what was found, as plain data
    chart, table   how it looks

Needs the ``bench`` extra. Called by ``hf-paged bench`` and ``benchmarks/compare.py``; no other layer imports it.
"""
