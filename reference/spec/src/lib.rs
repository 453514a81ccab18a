//! Configs, weights and site names of every model family: what reference, fixtures and device agree on.
