// Renders a component again only if a property, or a signal that it reads, has changed.
import { Component, h, type ComponentType, type FunctionComponent } from "preact";

export function memo<P extends object>(View: FunctionComponent<P>): ComponentType<P> {
  return class extends Component<P> {
    override shouldComponentUpdate(next: Readonly<P>): boolean {
      const before = this.props as Record<string, unknown>;
      return Object.entries(next).some(([name, value]) => before[name] !== value);
    }
    override render(props: P) {
      return h(View, props);
    }
  };
}
