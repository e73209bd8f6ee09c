# Finds the CUTLASS headers: CUTLASS_DIR (cache or environment; the tree or its include/), then the
# nvidia-cutlass wheel of the building Python, then the system. Sets CUTLASS_INCLUDE_DIR,
# CUTLASS_VERSION and the interface target CUTLASS::headers.

set(_hints "")
foreach(_dir IN ITEMS "${CUTLASS_DIR}" "$ENV{CUTLASS_DIR}")
  if(_dir)
    list(APPEND _hints "${_dir}" "${_dir}/include")
  endif()
endforeach()

if(NOT _hints AND Python_EXECUTABLE)
  # find_spec does not import the package, whose own dependencies need not be installed.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] + '/source/include' if s else '')"
    OUTPUT_VARIABLE _wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_wheel)
    list(APPEND _hints "${_wheel}")
  endif()
endif()

find_path(CUTLASS_INCLUDE_DIR cutlass/version.h HINTS ${_hints})

if(CUTLASS_INCLUDE_DIR)
  set(_numbers "")
  foreach(_part IN ITEMS MAJOR MINOR PATCH)
    file(STRINGS "${CUTLASS_INCLUDE_DIR}/cutlass/version.h" _line REGEX "#define CUTLASS_${_part} ")
    string(REGEX MATCH "[0-9]+" _number "${_line}")
    list(APPEND _numbers "${_number}")
  endforeach()
  list(JOIN _numbers "." CUTLASS_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  CUTLASS
  REQUIRED_VARS CUTLASS_INCLUDE_DIR
  VERSION_VAR CUTLASS_VERSION
  REASON_FAILURE_MESSAGE
    "the CUDA backend needs the CUTLASS headers: pip install nvidia-cutlass==4.2.0.0, or set CUTLASS_DIR, or build with FP8MOE_CUDA=OFF")

if(CUTLASS_FOUND AND NOT TARGET CUTLASS::headers)
  add_library(CUTLASS::headers INTERFACE IMPORTED)
  target_include_directories(CUTLASS::headers SYSTEM INTERFACE "${CUTLASS_INCLUDE_DIR}")
endif()
