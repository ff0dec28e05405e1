"""From text to typed masks: `parse_file`, `parse_text`. Knows mask IR, neither data nor GPUs. Imports lark on first use."""

from maskc.frontend.load import TypedFile, parse_file, parse_module, parse_text, split_target, std_names

__all__ = ["TypedFile", "parse_file", "parse_module", "parse_text", "split_target", "std_names"]
