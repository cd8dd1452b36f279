"""Small models that draft from a target's hidden states: EAGLE heads and MTP modules, in every published layout."""
