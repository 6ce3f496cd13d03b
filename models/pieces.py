"""How large the pieces are in which things are computed: speed and memory follow from it. No torch."""

NARROWEST = 1000
"""Width of a layer from which our recurrence is the faster of the two on a CPU."""

FEWEST_ROWS = 256
"""Of logits, taken at once in a step: enough for an efficient matrix product, few enough for a cache."""

WIDEST_GRAM = 128
"""Up to this width of the last layer a penalty without logits is cheaper, even where they are at hand."""

EVALUATION_WINDOW = 256
"""Words whose logits are made at once in evaluation, for the same reasons."""

MOST_LOGITS = 2**24
"""Numbers made at once in evaluation, however large the vocabulary is."""

MOST_COLUMNS = 16
"""Of a stream that is evaluated, side by side."""

SHORTEST_COLUMN = 1024
"""Words; a shorter one would not make up for its beginning."""

WARM_UP = 192
"""Words that a column begins before its own first one."""
