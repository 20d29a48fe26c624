//! `repr` of what the binding shows: a name, and the attributes that Python users know.

use numpy::PyUntypedArray;
use pyo3::prelude::*;

/// `Name(size, attribute=value, ...)` with the values as Python has them; arrays as lists. `size` may
/// be empty.
pub fn with_attributes(
    of: &Bound<'_, PyAny>,
    size: String,
    attributes: &[&str],
) -> PyResult<String> {
    let mut parts = vec![size];
    parts.retain(|size| !size.is_empty());
    for name in attributes {
        let mut value = of.getattr(*name)?;
        if value.is_instance_of::<PyUntypedArray>() {
            value = value.call_method0("tolist")?;
        }
        parts.push(format!("{name}={}", value.repr()?));
    }
    Ok(format!("{}({})", of.get_type().name()?, parts.join(", ")))
}

/// Blocks by state, or why nothing can be said of them.
pub fn blocks(py: Python<'_>, states: PyResult<kvmmu::States>) -> String {
    match states {
        Ok(states) => format!(
            "in_use={}, cached={}, available={}",
            states.in_use, states.cached, states.available
        ),
        Err(why) => why.value(py).to_string(),
    }
}

/// `1 move`, `2 moves`.
pub fn counted(n: usize, what: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{n} {what}{plural}")
}
