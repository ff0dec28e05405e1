"""maskc inside other people's training code: Hugging Face Transformers, and the shape of Megatron-Core's attention.

Nothing here is imported by the rest of maskc, and each module imports its framework only when it is used.
"""
