// Eager calls with torch's tensors: what ops/_library.py does around an op where nothing of torch
// watches, in a third of Python's time.
//
// torch is not linked: it is asked through objects of its own, which ops/_library.py hands over.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace fp8moe {

// Takes torch's objects by the names in eager.cpp. Before it, no array is torch's.
void attach_torch(nanobind::dict objects);

// A function of a tuple of arguments: it calls `direct` with the flat ones that they stand for and
// counts up the versions of the tensors in `written`. Where torch traces, intercepts or profiles,
// where a forward-mode gradient is taken, or one of the `arrays` requires grad, it calls `watched`
// instead, with the tuple, which does all that by itself. Bit i of `arrays` and `written`: flat
// argument i. kinds, a character an argument: '3' an Fp8Tensor's data, scale and layout, '2' the
// first two of them (of another array: itself, and none), 'p' a RoutingPlan's buffer and sizes, '.'
// itself. Subclasses, uint8 codes and other frameworks' arrays are taken apart in Python.
nanobind::object eager(nanobind::object direct, nanobind::object watched, const char* kinds,
                       uint64_t arrays, uint64_t written);

// An uninitialized tensor on the device of `like`, allocated without torch's dispatcher, or None if
// `like` is not torch's or not on the current device, if something traces, intercepts or fills what
// is allocated, or if torch refuses. shape: at most three sizes; dtype: a name, None for that of
// `like`.
nanobind::object empty(nanobind::handle like, nanobind::handle shape, nanobind::handle dtype);

// The same for an Fp8Tensor; None for what is no layout or format, too.
nanobind::object empty_fp8(nanobind::handle like, nanobind::handle shape, nanobind::handle layout,
                           nanobind::handle fp8_dtype, nanobind::handle pow2);

// The same for a RoutingPlan, of whose buffer nothing is written; None for sizes no plan can have,
// too.
nanobind::object empty_plan(nanobind::handle like, nanobind::tuple sizes);

}  // namespace fp8moe
