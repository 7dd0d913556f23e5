"""What a Megatron checkpoint holds of families that no reference file shows: keys, shapes and sources, by hand.

Each line of a table is: Megatron's key, its shape with one rank, how it is made, of which Hugging Face tensors.

    key  shape  how  source ...

`{q,k,v}` in a source stands for one source with each of them, in this order. Lines under `[0 2 3]` are about these
layers: their keys stand behind `decoder.layers.{local index}.`, their sources behind `model.layers.{layer}.`; lines
with `{e}` are about each of the eight experts. Other lines give whole names: under `[first]` what the first pipeline
stage holds, under `[last]` the last one. How:

    copy      one tensor, on each tensor parallel rank
    stack     several, one below the other, on each rank
    rows      each cut by rows over the ranks, then one below the other
    columns   cut by columns
    vocab     rows filled up with zeros to a multiple of the ranks, then cut
    qkv       query, key, value: for each of the two KV groups its three query heads, its key head, its value head; then
              cut by rows
    packed    the same from one tensor with all query, then all key, then all value heads
    halves    rows of a tensor that holds two matrices, one below the other
    turns     gate and up of an expert of a tensor [expert, in, gate 0, up 0, gate 1, ...], rows of both
    turned    an expert of a tensor [expert, in, out], columns of its transpose
    each      an expert of a tensor [expert, out]

The keys are those of the interface facts (tables 4.1 and 4.2); where these are silent, the table says whose they are.
"""
