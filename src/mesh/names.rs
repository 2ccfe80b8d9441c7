//! [`DimNames`]: arguments that name one or more mesh dimensions.

/// One or more names of mesh dimensions: `"tp"`, `["dp", "tp"]`, a vector or slice of names.
pub trait DimNames {
    /// Returns the names, in the order given.
    fn dim_names(&self) -> Vec<&str>;
}

impl DimNames for str {
    fn dim_names(&self) -> Vec<&str> {
        vec![self]
    }
}

impl DimNames for String {
    fn dim_names(&self) -> Vec<&str> {
        vec![self]
    }
}

impl<T: AsRef<str>> DimNames for [T] {
    fn dim_names(&self) -> Vec<&str> {
        self.iter().map(AsRef::as_ref).collect()
    }
}

impl<T: AsRef<str>, const N: usize> DimNames for [T; N] {
    fn dim_names(&self) -> Vec<&str> {
        self.as_slice().dim_names()
    }
}

impl<T: AsRef<str>> DimNames for Vec<T> {
    fn dim_names(&self) -> Vec<&str> {
        self.as_slice().dim_names()
    }
}

impl<N: DimNames + ?Sized> DimNames for &N {
    fn dim_names(&self) -> Vec<&str> {
        (**self).dim_names()
    }
}
