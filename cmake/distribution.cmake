# SPDX-License-Identifier: Apache-2.0
# What a wheel says of itself, in its .dist-info: a list of its parts (CycloneDX, PEP 770), and the licences of those
# that are inside libtessera and not ours. No time and no path: the same sources give the same bytes.
if(NOT SKBUILD_METADATA_DIR)
  return()
endif()
set(SBOM_PARTS "")
set(SBOM_DEPENDS "")
if(TESSERA_CUDA)
  # cudart alone is linked in; the driver is looked for when it is first needed.
  set(SBOM_PARTS ",
    {
      \"type\": \"library\",
      \"bom-ref\": \"cudart\",
      \"name\": \"NVIDIA CUDA Runtime (cudart_static)\",
      \"version\": \"${CUDAToolkit_VERSION}\",
      \"purl\": \"pkg:generic/nvidia-cuda-runtime@${CUDAToolkit_VERSION}\",
      \"licenses\": [{\"license\": {\"name\": \"NVIDIA CUDA Toolkit End User License Agreement\"}}]
    }")
  set(SBOM_DEPENDS ", \"cudart\"")
  find_file(TESSERA_CUDA_LICENCE NAMES EULA.txt License.txt NO_DEFAULT_PATH
            PATHS ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_TARGET_DIR}/../..)
  if(NOT TESSERA_CUDA_LICENCE)  # of the toolkit as packages of PyPI lay it out
    file(GLOB licences ${CUDAToolkit_BIN_DIR}/../dist-info/nvidia_cuda_runtime-*/licenses/License.txt)
    list(GET licences 0 TESSERA_CUDA_LICENCE)
  endif()
  if(NOT TESSERA_CUDA_LICENCE)
    message(FATAL_ERROR "the licence of cudart was not found: a wheel that holds cudart must hold it too; "
                        "set TESSERA_CUDA_LICENCE to the toolkit's EULA.txt")
  endif()
  install(FILES ${TESSERA_CUDA_LICENCE} DESTINATION ${SKBUILD_METADATA_DIR}/licenses
          RENAME NVIDIA-CUDA-EULA.txt COMPONENT python)
endif()
if(TESSERA_WITH_CUDNN)
  # The front end is headers alone, compiled in; libcudnn itself is neither linked nor shipped.
  tessera_version_in(${TESSERA_CUDNN_FRONTEND_INCLUDE}/cudnn_frontend_version.h version
    CUDNN_FRONTEND_MAJOR_VERSION CUDNN_FRONTEND_MINOR_VERSION CUDNN_FRONTEND_PATCH_VERSION)
  string(APPEND SBOM_PARTS ",
    {
      \"type\": \"library\",
      \"bom-ref\": \"cudnn-frontend\",
      \"name\": \"NVIDIA cuDNN front end (headers)\",
      \"version\": \"${version}\",
      \"purl\": \"pkg:pypi/nvidia-cudnn-frontend@${version}\",
      \"licenses\": [{\"expression\": \"Apache-2.0 AND MIT\"}]
    }")
  string(APPEND SBOM_DEPENDS ", \"cudnn-frontend\"")
  # Beside the headers as PyPI's package lays them out, or in the folder over them as its sources do.
  file(GLOB places ${TESSERA_CUDNN_FRONTEND_INCLUDE}/../nvidia_cudnn_frontend-${version}.dist-info/licenses)
  list(APPEND places ${TESSERA_CUDNN_FRONTEND_INCLUDE}/..)
  foreach(file IN ITEMS LICENSE.txt LICENSE-MIT.txt NOTICE)
    string(MAKE_C_IDENTIFIER "TESSERA_CUDNN_FRONTEND_${file}" found)
    find_file(${found} NAMES ${file} NO_DEFAULT_PATH PATHS ${places})
    mark_as_advanced(${found})
    if(NOT ${found})
      message(FATAL_ERROR "${file} of cuDNN's front end was not found: a wheel that holds its code must hold it too; "
                          "pip install nvidia-cudnn-frontend, set ${found}, or TESSERA_CUDNN=OFF")
    endif()
    install(FILES ${${found}} DESTINATION ${SKBUILD_METADATA_DIR}/licenses RENAME cudnn-frontend-${file} COMPONENT python)
  endforeach()
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/sbom.cdx.json.in ${PROJECT_BINARY_DIR}/tessera.cdx.json @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tessera.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT python)
