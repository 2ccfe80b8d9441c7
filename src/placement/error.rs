//! [`PlacementError`].

/// Errors of this room.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {}
