//! Dumps on disk: format, manifest, importers, tensor statistics, diff.
