_supports_onednn: bool
