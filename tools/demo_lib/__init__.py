"""The demo: one training from a slow origin and through the mount. Entry: tools/demo."""
