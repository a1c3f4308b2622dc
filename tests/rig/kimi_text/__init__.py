"""Stands for Kimi-K2.5's processor of images, whose real one needs code of the published checkpoint.

SGLang 0.5.23 managers/tokenizer_manager.py looks for processors in the submodules of the package that
SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE names.
"""
