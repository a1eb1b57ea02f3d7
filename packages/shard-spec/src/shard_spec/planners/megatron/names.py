"""Usual names of the submodules of a transformer block.

A name alone decides nothing: the shapes have to match, and blocks outside of known libraries are probed (see
`block_simulator`). Names only restrict the search, and are compared in lower case (``Wqkv``, ``Wo``).
"""

from __future__ import annotations


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


QUERY = _set("q_proj query q wq w_q q_lin q_linear to_q query_proj linear_q")
KEY = _set("k_proj key k wk w_k k_lin k_linear to_k key_proj linear_k")
VALUE = _set("v_proj value v wv w_v v_lin v_linear to_v value_proj linear_v")
FUSED_QKV = _set("c_attn qkv qkv_proj query_key_value wqkv w_qkv in_proj to_qkv c_qkv attn_qkv qkv_linear")
ATTENTION_OUT = _set(
    "o_proj out_proj o wo w_o dense out_lin out_linear to_out proj c_proj proj_out out linear_out "
    "attn_out output projection output_proj"
)
# Name of the module after attention in BERT and its descendants, with the Linear `dense` in it.
OUTPUT_BLOCK = _set("output out attention_output")

UP = _set(
    "fc1 c_fc up_proj w1 w3 dense_h_to_4h fc_in lin1 linear1 wi wi_0 wi_1 gate_proj gate up fc w_in ff1 "
    "linear_1 w_gate w_up fc_1 dense_in expand ffn layer_1 intermediate proj_up proj_up_gate"
)
FUSED_GATE_UP = _set("gate_up_proj w12 w13 gate_up up_gate_proj wi fc1_fused dense_h_to_4h input_linear")
DOWN = _set(
    "fc2 c_proj down_proj w2 w3 dense_4h_to_h fc_out lin2 linear2 wo down proj w_out ff2 linear_2 w_down "
    "fc_2 dense_out contract ffn_output layer_2 output output_linear proj_down"
)
# BERT: `intermediate.dense`, then `output.dense`.
INTERMEDIATE_BLOCK = _set("intermediate")

HEAD = _set("lm_head embed_out head output decoder proj_out vocab_projector unembed logits")
POSITION_WORDS = ("pos", "wpe", "token_type", "segment", "relative", "bucket")

NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_q_heads")
NUM_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_head_kv", "kv_heads", "num_query_groups"),
)
HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "d_kv", "head_size")
VOCAB_SIZE = ("vocab_size", "n_vocab", "vocabulary_size", "num_embeddings")
