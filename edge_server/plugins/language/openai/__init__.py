"""OpenAI's HTTP API for language models: conversion of its JSON to requests and from responses, and the runner of all
calls."""
