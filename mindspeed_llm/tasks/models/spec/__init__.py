"""Layers by family, under the names that `--spec MODULE layer_spec` has always had."""
