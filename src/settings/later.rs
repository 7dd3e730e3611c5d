//! Settings whose time has not come.

/// What the error says about a setting whose time has not come.
pub const NOT_SUPPORTED: &str = "not supported by this version";
