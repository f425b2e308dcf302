"""Rows that tests of tables share."""

ROW = {
    "stack": "megatron-classic", "gpu": "A100-SXM", "gpus": "8", "layers": "24", "hidden": "2048",
    "heads": "16", "ffn_hidden": "8192", "gated_ffn": "0", "vocab": "50257", "seq_len": "1024",
    "global_batch": "32", "micro_batch": "2", "tp": "2", "sp": "0", "cp": "1", "pp": "2",
    "vpp": "1", "dp": "2", "ep": "1", "zero_stage": "0", "schedule": "1f1b", "recompute": "full",
    "dtype": "fp16",
}  # fmt: skip
"""A GPT of 1.3e9 parameters, as Megatron-LM ran them in 2021."""

MIXTRAL = {
    **ROW, "stack": "megatron-te", "gpu": "H100-SXM", "dtype": "bf16", "model": "Mixtral-8x7B",
    "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn_hidden": "14336",
    "gated_ffn": "1", "vocab": "32000", "tp": "1", "pp": "1", "dp": "8", "ep": "8",
    "recompute": "none",
}  # fmt: skip
