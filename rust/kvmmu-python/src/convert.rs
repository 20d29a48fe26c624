//! From Python arguments to what the core takes, refusing what is not meant.
//!
//! Nothing is converted silently: an array of another dtype, a bool for a number, a float for a
//! count are errors that name the argument, what was given and what is allowed.

use std::collections::HashMap;

use kvmmu::{Eviction, Keys, PageOrders, Placement, Unit};
use numpy::{Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1};
use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyMapping, PyMappingMethods, PyString};

use crate::errors::{Number, error};

fn refuse(py: Python<'_>, name: &str, given: String, allowed: &str) -> PyErr {
    let message = format!("{name} = {given}: allowed is {allowed}");
    error(
        py,
        "InvalidConfig",
        message,
        &[("argument", Number::Text(name.into()))],
    )
}

fn shown(value: &Bound<'_, PyAny>) -> String {
    value
        .repr()
        .map_or_else(|_| "?".into(), |text| text.to_string())
}

/// What an object is, for a message about an array.
pub fn describe(value: &Bound<'_, PyAny>) -> String {
    match value.cast::<PyUntypedArray>() {
        Ok(array) => {
            let layout = if array.is_c_contiguous() {
                ""
            } else {
                ", not C-contiguous"
            };
            let dtype = array.dtype();
            format!("{} {:?}{layout}", dtype.typeobj(), array.shape())
        }
        Err(_) => format!(
            "a {}",
            value
                .get_type()
                .name()
                .map_or_else(|_| "?".into(), |name| name.to_string())
        ),
    }
}

/// A whole number in a range.
pub fn integer(value: &Bound<'_, PyAny>, name: &str, least: i64, most: i64) -> PyResult<i64> {
    let allowed = || format!("a whole number from {least} to {most}");
    if value.is_instance_of::<PyBool>() {
        return Err(refuse(value.py(), name, shown(value), &allowed()));
    }
    match value.extract::<i64>() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(refuse(value.py(), name, shown(value), &allowed())),
    }
}

/// A whole number from `least` that fits 32 bits.
pub fn count(value: &Bound<'_, PyAny>, name: &str, least: u32) -> PyResult<u32> {
    integer(value, name, i64::from(least), i64::from(u32::MAX)).map(|number| number as u32)
}

/// The id of a sequence: any that there could be, so that one of nobody is unknown to the core.
pub fn sequence(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer(value, "sequence", i64::MIN, i64::MAX)
}

/// The number of a step.
pub fn step(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    integer(value, "step", 0, i64::MAX).map(|number| number as u64)
}

/// The number of a lease.
pub fn lease(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    integer(value, "lease", 0, i64::MAX).map(|number| number as u64)
}

/// What a pseudo-random order begins with.
pub fn seed(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer(value, "seed", i64::MIN, i64::MAX)
}

/// A number between 0 and 1.
pub fn ratio(value: &Bound<'_, PyAny>, name: &str) -> PyResult<f64> {
    let number = if value.is_instance_of::<PyBool>() {
        None
    } else {
        value.extract::<f64>().ok()
    };
    match number {
        Some(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err(refuse(
            value.py(),
            name,
            shown(value),
            "a number from 0 to 1",
        )),
    }
}

/// One of some words.
pub fn word<'a>(
    value: &Bound<'_, PyAny>,
    name: &str,
    allowed: &'static [&'static str],
) -> PyResult<&'a str> {
    let given = value.extract::<String>().ok();
    match allowed.iter().find(|&&word| given.as_deref() == Some(word)) {
        Some(word) => Ok(word),
        None => Err(refuse(
            value.py(),
            name,
            shown(value),
            &format!("one of {allowed:?}"),
        )),
    }
}

/// A share: from 0 to below 1.
pub fn share(value: &Bound<'_, PyAny>, name: &str) -> PyResult<f64> {
    match ratio(value, name) {
        Ok(share) if share < 1.0 => Ok(share),
        _ => Err(refuse(
            value.py(),
            name,
            shown(value),
            "a number from 0 to below 1",
        )),
    }
}

/// Where new blocks are taken from; by default in address order.
pub fn placement(value: Option<&Bound<'_, PyAny>>, seed: i64) -> PyResult<Placement> {
    let Some(value) = value else {
        return Ok(Placement::AddressOrder);
    };
    let names = &["address", "fullest", "fifo", "scatter"];
    Ok(match word(value, "placement", names)? {
        "fullest" => Placement::Fullest,
        "fifo" => Placement::Fifo,
        "scatter" => Placement::Scatter { seed: seed as u64 },
        _ => Placement::AddressOrder,
    })
}

/// Page orders, a sequence of whole numbers.
pub fn page_orders(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<PageOrders>> {
    let Some(value) = value else { return Ok(None) };
    let refused = || {
        let allowed = "whole numbers from 0 to 9, 0 among them";
        refuse(value.py(), "page_orders", shown(value), allowed)
    };
    if value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
        return Err(refused());
    }
    let mut orders = Vec::new();
    for order in value.try_iter().map_err(|_| refused())? {
        let order = integer(&order?, "page_orders", 0, 9).map_err(|_| refused())?;
        orders.push(order as u32);
    }
    PageOrders::new(&orders).map(Some).map_err(|_| refused())
}

/// Which cached blocks are evicted first; by default the least recently used.
pub fn eviction(value: Option<&Bound<'_, PyAny>>) -> PyResult<Eviction> {
    let Some(value) = value else {
        return Ok(Eviction::Lru);
    };
    Ok(match word(value, "eviction", &["lru", "lfu"])? {
        "lfu" => Eviction::Lfu,
        _ => Eviction::Lru,
    })
}

/// Yes or no, not a number that could be taken for it.
pub fn flag(value: &Bound<'_, PyAny>, name: &str) -> PyResult<bool> {
    match value.cast::<PyBool>() {
        Ok(flag) => Ok(flag.is_true()),
        Err(_) => Err(refuse(value.py(), name, shown(value), "True or False")),
    }
}

/// Which block of a pool of `num_blocks` nobody is given: by default the last.
pub fn null_block(value: Option<&Bound<'_, PyAny>>, num_blocks: u32) -> PyResult<u32> {
    match value {
        None => Ok(num_blocks),
        Some(given) if given.is_instance_of::<PyString>() => {
            match word(given, "null_block", &["last", "first"])? {
                "first" => Ok(0),
                _ => Ok(num_blocks),
            }
        }
        Some(given) => {
            integer(given, "null_block", 0, i64::from(num_blocks)).map(|block| block as u32)
        }
    }
}

/// What the entries of tables name: blocks, unless one of the two is given.
pub fn unit(
    kernel_block_size: Option<&Bound<'_, PyAny>>,
    page_order: Option<&Bound<'_, PyAny>>,
    block_size: u32,
) -> PyResult<Unit> {
    let size = (kernel_block_size)
        .map(|size| integer(size, "kernel_block_size", 1, i64::from(block_size)))
        .transpose()?;
    let order = (page_order)
        .map(|order| integer(order, "page_order", 0, 9))
        .transpose()?;
    match (size, order) {
        (None, None) => Ok(Unit::Block),
        (Some(size), None) => Ok(Unit::KernelBlock {
            tokens: size as u32,
        }),
        (None, Some(order)) => Ok(Unit::Page {
            order: order as u32,
        }),
        (Some(size), Some(order)) => Err(refuse(
            page_order.expect("it has a value").py(),
            "page_order",
            format!("{order} with kernel_block_size = {size}"),
            "one of the two",
        )),
    }
}

/// Block numbers from int32: negative ones are no block of any pool.
pub fn blocks(array: &[i32]) -> &[u32] {
    bytemuck::cast_slice(array)
}

/// A C-contiguous array of one dimension, borrowed for one call.
pub struct Array<'py, T: Element>(PyReadonlyArray1<'py, T>);

impl<T: Element> Array<'_, T> {
    /// Its elements.
    pub fn slice(&self) -> &[T] {
        self.0.as_slice().expect("checked when it was borrowed")
    }
}

/// Borrows an array of `T`, one dimension, C-contiguous.
pub fn array<'py, T: Element>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Array<'py, T>> {
    let borrowed = (value.cast::<PyArray1<T>>().ok())
        .filter(|array| array.is_c_contiguous())
        .and_then(|array| array.try_readonly().ok())
        .filter(|array| array.as_slice().is_ok());
    borrowed.map(Array).ok_or_else(|| {
        let py = value.py();
        let allowed = format!(
            "an array of {}, one dimension, C-contiguous, aligned",
            T::get_dtype(py).typeobj()
        );
        refuse(py, name, describe(value), &allowed)
    })
}

/// As [`array()`], or `None`.
pub fn optional<'py, T: Element>(
    value: Option<&Bound<'py, PyAny>>,
    name: &str,
) -> PyResult<Option<Array<'py, T>>> {
    value.map(|value| array(value, name)).transpose()
}

/// Salt and extra keys of a prompt.
pub fn keys(salt: Option<&Bound<'_, PyAny>>, extra: Option<&Bound<'_, PyAny>>) -> PyResult<Keys> {
    let bytes = |value: &Bound<'_, PyAny>, name: &str| match value.cast::<PyBytes>() {
        Ok(bytes) => Ok(Box::<[u8]>::from(bytes.as_bytes())),
        Err(_) => Err(refuse(value.py(), name, shown(value), "bytes")),
    };
    let salt = salt.map_or(Ok(Box::default()), |salt| bytes(salt, "salt"))?;
    let mut found = HashMap::new();
    if let Some(extra) = extra {
        let Ok(mapping) = extra.cast::<PyMapping>() else {
            return Err(refuse(
                extra.py(),
                "extra_keys",
                shown(extra),
                "a mapping of block index to bytes",
            ));
        };
        for item in mapping.items()?.iter() {
            let (index, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
            let index = count(&index, "extra_keys block index", 0)?;
            found.insert(index, bytes(&value, "extra_keys value")?);
        }
    }
    Ok(Keys { salt, extra: found })
}
